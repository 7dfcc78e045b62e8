"""The worker runs step plans on a device.

The core and the step loop do not use torch; the worker and the packages below it do.
"""
