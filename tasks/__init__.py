"""The steps of `tools` as Prefect tasks: thin wrappers, no logic of their own."""
