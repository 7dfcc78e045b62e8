"""The sampling and pooling parameters of a sequence, in the form that is sent from gateways to engines."""
