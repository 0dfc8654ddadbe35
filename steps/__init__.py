"""One file a step: what one container does. Each runs alone as `python -m steps.<name>`."""
