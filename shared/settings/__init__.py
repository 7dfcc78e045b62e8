"""Groups of settings: dataclasses of which `shared.config` builds the settings of each service.

Other packages import the settings of services from `shared.config`, and from here only functions that read one group.
"""
