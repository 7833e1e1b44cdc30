"""Rules about batches: what counts in them, and how they are drawn."""

from sealegs.preflight_check.rule import Family, RuleFinding, Unknown

DATA = Family("DAT", "data")


@DATA.rule()
def nothing_to_learn(target_share: float, emptiest_row: float | None = None) -> RuleFinding | None:
    """Batches in which no token counts for the loss.

    Why: the mean over no targets is 0 / 0 = NaN; a mean over a handful is all noise. Long prompts that are cut before
      the answer leave rows like that.
    Set: drop rows without targets, or cut prompts from the left; divide by the targets of the whole batch.
    Sure: established.
    See: the documentation of torch.nn.CrossEntropyLoss, on ignore_index.
    """
    if target_share > 0.01 and (emptiest_row is None or emptiest_row > 0):
        return None
    if target_share <= 0:
        return RuleFinding("error", "no token of the batch counts", "labels", "some that are not masked")
    row = " and there are rows without any" if emptiest_row == 0 else ""
    return RuleFinding("warning", f"{target_share:.1%} of the tokens count{row}", "labels", "rows with targets only")


@DATA.rule()
def mostly_padding(padding_share: float) -> RuleFinding | None:
    """Batches are mostly padding.

    Why: padding costs as much as text and teaches nothing; and where losses are averaged over rows or micro-batches, a
      token in a short row weighs many times one in a long row.
    Set: pack documents into full rows, with attention kept inside each; divide by the targets of the whole batch.
    Sure: supported.
    See: Krell et al. 2021, Efficient sequence packing without cross-contamination.
    """
    if padding_share <= 0.5:
        return None
    return RuleFinding("note", f"{padding_share:.0%} of the tokens are padding", "packing", "true")


@DATA.rule()
def badly_shuffled(
    shuffle: str | None = None,
    shuffle_buffer: int | None = None,
    grouped_by_length: bool | None = None,
    finetunes: bool = False,
) -> RuleFinding | None:
    """The data are read almost in the order they lie in.

    Why: neighbours in a corpus are alike: one site, one language, one length. Batches of a kind pull all the same way,
      the loss goes up and down with the pockets, and a bad one comes all at once: the usual beginning of a spike.
    Set: shuffle documents over the whole corpus; where that cannot be, the shards, and a buffer of 10,000 or more.
    Sure: established as a cause of spikes in public logbooks.
    See: Bekman, Machine learning engineering open book, on types of loss spikes.
    """
    if shuffle is None and grouped_by_length is None:
        raise Unknown("shuffle")
    if grouped_by_length and finetunes:  # usual there: the loss goes up and down with it, and `check` says so
        return None
    if grouped_by_length:
        return RuleFinding("note", "batches are grouped by length", "grouped_by_length", "false")
    if shuffle == "none":
        return RuleFinding("warning", "the data are not shuffled", "shuffle", "all")
    if shuffle == "shards" or (shuffle == "buffer" and (shuffle_buffer or 0) < 10_000):
        how = "only shards are" if shuffle == "shards" else f"a buffer of {shuffle_buffer or 0} is"
        return RuleFinding("note", f"{how} shuffled", "shuffle", "all, or a buffer of 10,000 or more")
    return None


@DATA.rule()
def workers_alike(workers: int, workers_share_seed: bool) -> RuleFinding | None:
    """Workers of the loader draw the same random numbers.

    Why: a generator inside the data set is copied into every worker as it is: each gives the same crops, masks or
      samples. Batches hold near copies, and an epoch sees a fraction of what it should.
    Set: seed the data set's own generator by torch.utils.data.get_worker_info().seed, in worker_init_fn.
    Sure: established.
    See: the documentation of torch.utils.data, on randomness in multi-process data loading.
    """
    if workers < 2 or not workers_share_seed:
        return None
    return RuleFinding("warning", f"{workers} workers, one seed", "worker_init_fn", "one that seeds by worker")


@DATA.rule()
def ranks_alike(ranks: int, ranks_share_data: bool) -> RuleFinding | None:
    """Every rank reads the same data.

    Why: with one seed and no split, the gradient that the ranks average is the same one many times over: the batch is
      as large as one rank's, its noise too, at the learning rate of the large one.
    Set: a DistributedSampler, or a seed for each rank: seed + rank.
    Sure: established.
    See: the documentation of torch.utils.data.distributed.DistributedSampler.
    """
    if ranks < 2 or not ranks_share_data:
        return None
    return RuleFinding(
        "error", f"{ranks} ranks, the same batches on each", "ranks_share_data", "false: seed + rank, or a split"
    )
