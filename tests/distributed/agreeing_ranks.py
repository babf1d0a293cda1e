"""Prints what each rank receives from the others. torchrun --nproc_per_node 2 agreeing_ranks.py"""

from sparsellm.distributed.groups import MainRankFailed, first_error, gather, on_main, process_group


def fail():
    raise ValueError("no room")


with process_group("cpu") as ranks:
    me = f"rank {ranks.rank}"
    heard = [gather(me), first_error(None), first_error(f"{me} failed"), on_main(ranks, lambda: me)]
    heard.append(first_error(None if ranks.is_main else f"{me} failed"))
    try:
        on_main(ranks, fail)
    except (ValueError, MainRankFailed) as error:
        heard.append(f"{type(error).__name__}: {error}")
    print(f"{me}: {heard}\n", end="", flush=True)
