"""An operator who clicks links and buttons by the text that they show, and counts the clicks."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from urllib.parse import urljoin

from django.test import Client

from .desk import text_of

_VOID = frozenset({"input", "link", "meta", "br", "hr", "img"})


@dataclass
class _Form:
    path: str
    is_post: bool
    values: dict[str, list[str]] = field(default_factory=dict)
    boxes: set[str] = field(default_factory=set)


@dataclass
class _Control:
    """A link, a button or a search field. `clicks`: with those that open the folds around it."""

    clicks: int
    path: str = ""
    form: _Form | None = None
    name: str = ""
    value: str = ""
    text: str = ""


class _Page(HTMLParser):
    """The links, buttons and forms of a page."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__()
        self._path = path
        self.controls: list[_Control] = []
        self.forms: list[_Form] = []
        self._open: list[str] = []
        self._folds: list[bool] = []
        self._select = self._area = ""
        self._reading: _Control | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        name, form = values.get("name", ""), self.forms[-1] if "form" in self._open else None
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "details":
            self._folds.append("open" not in values)
        elif tag == "a" and "href" in values:
            self._add(_Control(1 + sum(self._folds), urljoin(self._path, values["href"])))
        elif tag == "form":
            place = urljoin(self._path, values.get("action", ""))
            self.forms.append(_Form(place, values.get("method", "get").lower() == "post"))
        elif form is None:
            return
        elif tag == "button" and values.get("type", "submit") == "submit":
            self._add(_Control(1 + sum(self._folds), form=form, name=name, value=values.get("value", "")))
        elif tag == "input":
            self._add_input(form, name, values)
        elif tag == "select":
            self._select = name
        elif tag == "option" and ("selected" in values or self._select not in form.values):
            form.values[self._select] = [values.get("value", "")]
        elif tag == "textarea":
            self._area = name
            form.values[name] = [""]

    def _add_input(self, form: _Form, name: str, values: dict[str, str]) -> None:
        kind = values.get("type", "text")
        if kind in {"checkbox", "radio"}:
            form.boxes.add(name)
        if kind not in {"checkbox", "radio"} or "checked" in values:
            form.values.setdefault(name, []).append(values.get("value", "on" if kind == "checkbox" else ""))

    def _add(self, control: _Control) -> None:
        self.controls.append(control)
        self._reading = control

    def handle_data(self, data: str) -> None:
        if self._reading is not None:
            self._reading.text += data
        if self._area:
            self.forms[-1].values[self._area][0] += data.removeprefix("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag == "details":
            self._folds.pop()
        elif tag == "textarea":
            self._area = ""
        if tag in {"a", "button"}:
            self._reading = None
        while self._open and self._open.pop() != tag:
            pass

    def find(self, text: str) -> _Control:
        """Return the control with this text that takes the fewest clicks."""
        found = [each for each in self.controls if _shown(each.text) == text]
        assert found, f"{self._path} has no {text!r}: {sorted({_shown(each.text) for each in self.controls})}"
        return min(found, key=lambda each: each.clicks)


def _shown(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().removesuffix("…").replace(" :", ":")


class Visitor:
    """Begins on the overview. `text`: of the page that is open. `clicks`: so far, without typing."""

    def __init__(self, client: Client) -> None:
        self._client, self.clicks = client, 0
        self._go("/admin/")

    def click(self, text: str, **typed: str) -> None:
        """Click the link or button with this text. `typed`: fields of the button's form, by name."""
        control = self._page.find(text)
        self.clicks += control.clicks
        if control.form is None:
            self._go(control.path)
        else:
            chosen = {control.name: [control.value]} if control.name else {}
            self._send(control.form, chosen | {name: [value] for name, value in typed.items()})

    def search(self, words: str) -> None:
        """Type into the search of every page, and press Enter."""
        self.clicks += 1
        self._send(next(form for form in self._page.forms if "q" in form.values), {"q": [words]})

    def _send(self, form: _Form, chosen: dict[str, list[str]]) -> None:
        unknown = set(chosen) - set(form.values) - form.boxes - {each.name for each in self._page.controls}
        assert not unknown, f"{form.path} has no field {unknown}"
        self._go(form.path, form.values | chosen, is_post=form.is_post)

    def _go(self, path: str, values: dict[str, list[str]] | None = None, *, is_post: bool = False) -> None:
        send = self._client.post if is_post else self._client.get
        response = send(path, values, follow=True)
        assert response.status_code == 200, (path, response.status_code)
        last = response.redirect_chain[-1][0] if response.redirect_chain else path
        self.text = text_of(response)
        self._page = _Page(urljoin(path, last), self.text)
