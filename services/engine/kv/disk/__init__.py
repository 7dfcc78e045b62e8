"""KV blocks on the local disk, which outlive the engines that computed them.

segment    two files of appended blocks: their bytes, and an entry for each; reading and writing them
store      the segments of a directory, of this engine and of others: an index in memory, bounded size
tier       the threads between the step loop and a store: writes blocks, reads them into host blocks
"""
