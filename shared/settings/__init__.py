"""Groups of settings: dataclasses of which `antiphon.shared.config` builds the settings of each service.

Other packages import the settings of services from there, and from here only functions that read one group.
"""
