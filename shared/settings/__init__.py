"""Groups of settings: dataclasses of which `shared.config` builds the settings of each service.

Others import the settings of services from `shared.config`, and from here only a function that reads one group.
"""
