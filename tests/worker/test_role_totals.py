from baton.worker.role_totals import RoleTotals


def test_role_totals_keep_counts_of_each_role():
    totals = RoleTotals()
    totals.add("prefill", {"steps": {(): 5}, "tokens": {("prompt",): 50, ("decode",): 0}})
    totals.add("prefill", {"steps": {(): 6}, "tokens": {("prompt",): 60, ("decode",): 1}})
    totals.add("decode", {"steps": {(): 10}, "tokens": {("prompt",): 60, ("decode",): 8}})
    totals.add("prefill", {"steps": {(): 11}, "tokens": {("prompt",): 65, ("decode",): 8}})
    assert totals.of("steps") == {("prefill",): 7, ("decode",): 4}
    assert totals.of("tokens") == {
        ("prefill", "prompt"): 65,
        ("prefill", "decode"): 1,
        ("decode", "prompt"): 0,
        ("decode", "decode"): 7,
    }


def test_role_totals_are_empty_when_nothing_was_counted():
    assert RoleTotals().of("steps") == {}
