import pytest

from palaestra_slots.core.charsets import decoded


@pytest.mark.parametrize(
    ("name", "used", "text"),
    [
        ("gb2312", "gbk", "朱镕基"),
        ("GBK", "gb18030", "𠮷"),
        ("iso-8859-1", "cp1252", "5 € – “ok”"),
        ("latin1", "cp1252", "5 €"),
        ("us-ascii", "cp1252", "é"),
        ("iso-8859-9", "cp1254", "“ğ”"),
        ("shift_jis", "cp932", "①髙"),
        ("euc-kr", "cp949", "똠방각하"),
        ("iso-8859-15", "iso-8859-15", "5 €"),
        ("iso-8859-8-i", "iso-8859-8", "שלום"),
        ("ISO_8859-6-E", "iso-8859-6", "سلام"),
        ("windows-874", "cp874", "ไทย"),
        ("cp-850", "cp850", "Grüße"),
        ("x-sjis", "cp932", "①髙"),
        ("utf-8", "utf-8-sig", "a"),
        (None, "utf-8", "ü"),
        ("unknown", "utf-8", "ü"),
        ("hex", "utf-8", "abc"),
        ("rot13", "utf-8", "abc"),
        ("idna", "utf-8", "abc"),
        ("utf-8\0", "utf-8", "abc"),
    ],
)
def test_a_name_means_what_programs_use_under_it(name: str | None, used: str, text: str) -> None:
    assert decoded(text.encode(used), name) == text


@pytest.mark.parametrize("name", ["utf-8", "gb2312", "iso-8859-1", "utf-16", "utf-7", "shift_jis", "idna", "punycode"])
def test_no_bytes_are_an_error(name: str) -> None:
    assert isinstance(decoded(bytes(range(256)) + b"\xff\xfe\xff", name), str)
