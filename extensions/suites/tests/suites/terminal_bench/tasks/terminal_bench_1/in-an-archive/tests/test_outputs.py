import tarfile


def test_members():
    with tarfile.open("/app/data.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["data", "data/x", "data/y"]
