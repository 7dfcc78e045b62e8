"""Names, directories, files and versions of models and adapters, for all services."""
