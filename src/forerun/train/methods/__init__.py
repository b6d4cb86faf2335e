"""What can be trained. A method says how its module is made, what its loss is, how it is written to a folder and what
drafts with it; answering, learning and measuring are the same for all.

    draft               a small transformer, distilled from the target
    blockwise, medusa   heads on the target's last state
    eagle, eagle3, mtp  a layer that foresees the target's states
    parallel            look-ahead embeddings, which the target itself reads
"""
