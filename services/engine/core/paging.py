"""How many blocks a sequence takes, with groups of layers whose blocks are freed behind a window. Pure arithmetic.

A column is what one block of the first group has beside it: one block of each further group, for the same tokens. A
sequence holds the columns that later steps may read, and those of the steps in flight.
"""

from dataclasses import dataclass

MUTUAL_TOKENS = 2048
"""More tokens than any image has whose tokens attend to each other, and which a step computes as a whole therefore."""
WHOLE = 2**62
"""More tokens than any step computes: the number of tokens of a step if prompts are not divided."""


@dataclass(frozen=True, slots=True)
class Paging:
    """`num_windowed`: number of groups beside the first one; 0: nothing is freed, and there are no columns."""

    block_size: int
    num_windowed: int = 0
    window: int = 0
    """Number of tokens that a query sees at most in the layers of these groups, itself included."""
    together: int = 0
    """Number of tokens of a sequence that a step may have to compute together, whatever its budget."""

    def blocks_for(self, num_tokens: int) -> int:
        """Returns how many blocks of one group hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def first_read(self, position: int) -> int:
        """Returns the first column that a token at this position, or a later one, reads."""
        return max(0, position - self.window + 1) // self.block_size

    def first_kept(self, num_computed: int) -> int:
        """Returns the first column that a sequence keeps with so many computed tokens.

        It keeps one more than it reads, for a receiver of its KV, which begins at the last full block.
        """
        return self.first_read(num_computed - self.block_size)

    def most_columns(self, step_tokens: int) -> int:
        """Returns how many columns a sequence holds at most if a step computes up to `step_tokens` of it."""
        return self.blocks_for(max(step_tokens, self.together) + self.window + self.block_size) + 1

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Returns how many blocks a sequence that grows to `num_tokens` holds at most."""
        count = self.blocks_for(num_tokens)
        return count + self.num_windowed * min(count, self.most_columns(step_tokens))

    def capacity(self, num_blocks: int, step_tokens: int) -> int:
        """Returns the length of the longest sequence, in tokens, that `num_blocks` are enough for."""
        columns = self.most_columns(step_tokens)
        within = min(columns, num_blocks // (1 + self.num_windowed))
        return self.block_size * max(within, num_blocks - self.num_windowed * columns)
