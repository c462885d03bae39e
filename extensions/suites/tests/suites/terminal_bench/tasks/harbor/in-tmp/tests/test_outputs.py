def test_state():
    with open("/tmp/state") as file:
        assert file.read().strip() == "ready"
