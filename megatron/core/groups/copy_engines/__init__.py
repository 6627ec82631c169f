"""Messages between the GPUs of one host that cost no SM: copy engines carry them, streams wait in memory.

NCCL's kernels wait and copy on SMs. Beside them GEMMs and attention run on fewer, and a GEMM whose
blocks just fill the GPU takes twice as long as soon as one SM is gone. Here every rank maps memory of its
peers (``window.py``), copies are plain memory copies, and a stream waits for a word in memory to reach a number
(``stream_queue.py``), which the GPU's front end does by itself.

    exchange.py   gathers and exchanges among all ranks of a group
    mailbox.py    messages from rank to rank
    choice.py     which groups have all of this; the others use their torch.distributed handle
"""
