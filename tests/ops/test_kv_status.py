from __future__ import annotations

from daemon.ops.server_status import server_status
from daemon.ops.view import View


def test_requested_and_effective_kv_stand_side_by_side_with_the_reason(view: View) -> None:
    kv = server_status(view, view.fleet.servers["chat"])["kv"]
    assert kv is not None
    assert (kv["requested"]["policy"], kv["requested"]["k"]) == ("balanced", "int8")
    layers = server_status(view, view.fleet.servers["chat"])["layers"]
    assert layers is not None
    assert layers[1] == {
        "first": 3, "last": 3, "kind": "sliding", "requested": "turbo8v4", "effective": "fp16",
        "reason": "a rule", "backend": "mlx", "backend_reason": None, "packing_backend": "mlx",
        "packing_reason": None,
    }  # fmt: skip
    assert kv["compression"] == 2.56
    assert kv["fallbacks"] == [{"layers": [3, 3], "mode": "fp16", "reason": "a rule"}]
