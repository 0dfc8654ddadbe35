"""What steps share: the step contract, artifacts, paths, tables, errors. Light imports only."""
