"""What the scheduler asks: who waits, who comes next, how prompts share a step, and whether drafts pay."""
