"""Random calls of every public function, on tensors of any strides, compared with float64 and PyTorch's operators.

``python -m tests.fuzz`` makes them in many processes, on a GPU if there is one; tests/fuzz/test_fuzz.py a few, in pytest.

views.py     a tensor inside a poisoned storage, made from a seed and its strides
formula.py   RoPE in float64, and the error that each element may have
originals.py PyTorch's operators and modules, with the arguments of our functions
given.py     one call: its tensors, its mode, and whether its results are right
case.py      a class of calls and its neighbour, the order in which they come, and the script that is printed
draw*.py     what is drawn from a seed and an index
refusals.py  where drop-ins refuse other calls than their originals, and why
forced.py    variants of rows, forced one after another; which of them were chosen
worker.py    one process; __main__.py runs all of them
"""
