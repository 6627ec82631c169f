"""Communication between the GPUs of one host that uses copy engines instead of SMs.

NCCL kernels wait and copy on SMs, so that overlapped GEMMs and attention have fewer SMs. A GEMM whose thread blocks
exactly fill the GPU takes twice as long if a single SM is missing. Here every rank maps the memory of its peers
(``window.py``), transfers are plain memory copies, and streams wait for a flag word in memory to reach a number
(``stream_queue.py``), which the GPU front end does without an SM.

    exchange.py   all-gather and all-to-all within a group
    mailbox.py    point-to-point messages between neighbor ranks
    choice.py     which groups support copy engines; the other groups use their torch.distributed handle"""
