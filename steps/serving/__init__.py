"""The model's server: started and watched by `steps.serve`, spoken to by the flow. Only `launch` imports vLLM."""
