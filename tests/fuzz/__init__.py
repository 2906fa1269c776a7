"""Random calls of all that is public, over tensors of any strides, against float64 and what PyTorch's own operators do.

``python -m tests.fuzz`` makes them in many processes, on a GPU where there is one; tests/fuzz/test_fuzz.py a few, in pytest.

views.py     a tensor inside a poisoned storage, from a seed and its strides
formula.py   RoPE in float64, and the error that each element may have
originals.py PyTorch's operators and modules, with the arguments of ours
given.py     one call: its tensors, the mode that it runs in, and whether what it did is right
case.py      a class of calls and its neighbour, the order in which they come, and the script that is printed
draw*.py     what is drawn of a seed and an index
refusals.py  where drop-ins refuse otherwise than their originals, and why
forced.py    variants of rows, forced one after another; what came up
worker.py    one process; __main__.py all of them
"""
