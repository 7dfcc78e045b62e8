"""The worker: runs step plans on a device. torch lives here and below (`models`, `kernels`)."""
