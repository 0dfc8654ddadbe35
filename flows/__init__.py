"""What happens, in which order, where, with which retries. The only package that imports Prefect."""
