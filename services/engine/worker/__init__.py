"""What the backends share: rows and inputs of a step, memory, files of a model. A worker runs step plans on a device.

The core and the step loop do not use torch; the worker and the packages below it do.
"""
