"""The formats that hold a string to a form, as patterns. Each is exact or narrower than its standard, never wider."""

from __future__ import annotations

from typing import Final

_YEAR: Final = r"[0-9]{4}"
_DATE: Final = (  # February ends with the 28th: which years have a 29th is more than a pattern should know
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8])))"
)
_CLOCK: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_HOST: Final = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_BYTE: Final = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4: Final = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_HEX: Final = "[0-9A-Fa-f]"
_GROUP: Final = rf"{_HEX}{{1,4}}"
_IPV6: Final = "|".join(
    [rf"(?:{_GROUP}:){{7}}{_GROUP}", rf"(?:{_GROUP}:){{1,7}}:"]
    + [rf"(?:{_GROUP}:){{1,{7 - n}}}(?::{_GROUP}){{1,{n}}}" for n in range(1, 7)]
    + [rf":(?:(?::{_GROUP}){{1,7}}|:)"]
)
_DAYS: Final = r"(?:[0-9]{1,4}D|[0-9]{1,4}M(?:[0-9]{1,4}D)?|[0-9]{1,4}Y(?:[0-9]{1,4}M(?:[0-9]{1,4}D)?)?)"
_CLOCK_SPAN: Final = r"T(?:[0-9]{1,4}S|[0-9]{1,4}M(?:[0-9]{1,4}S)?|[0-9]{1,4}H(?:[0-9]{1,4}M(?:[0-9]{1,4}S)?)?)"

FORMATS: Final = {
    "date": rf"^{_DATE}$",
    "time": rf"^{_TIME}$",
    "date-time": rf"^{_DATE}T{_TIME}$",
    "duration": rf"^P(?:{_DAYS}(?:{_CLOCK_SPAN})?|{_CLOCK_SPAN}|[0-9]{{1,4}}W)$",
    "email": rf"^[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{_HOST}$",
    "hostname": rf"^{_HOST}$",
    "ipv4": rf"^{_IPV4}$",
    "ipv6": rf"^(?:{_IPV6})$",
    "uuid": rf"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
    "uri": rf"^https?://{_HOST}(?::[0-9]{{1,4}})?(?:/[A-Za-z0-9._~-]*)*(?:\?[A-Za-z0-9._~=&-]*)?(?:#[A-Za-z0-9._~-]*)?$",
    "json-pointer": r"^(?:/(?:[^/~]|~[01])*)*$",
}
