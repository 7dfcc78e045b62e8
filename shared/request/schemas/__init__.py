"""JSON Schemas before they are compiled: what no grammar can enforce is left out, and objects are closed."""
