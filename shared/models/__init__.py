"""Models and adapters as all services know them: names, directories, files, versions."""
