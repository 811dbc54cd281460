from baton.worker.role_totals import RoleTotals


def test_what_was_counted_in_a_role_stays_with_it():
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


def test_nothing_is_told_of_what_nobody_has_counted():
    assert RoleTotals().of("steps") == {}
