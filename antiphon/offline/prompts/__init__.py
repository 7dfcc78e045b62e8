"""What the offline API makes of the arguments of a call: prompts, images, guided outputs; text in this process."""
