"""A page as a tree, read by the standard library's parser, which must find every element closed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser


@dataclass
class Node:
    """An element: its attributes by lower-case name, its children in order."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: "list[Node | str]" = field(default_factory=list)

    def all(self, tag: str = "", class_: str = "") -> "Iterator[Node]":
        """Walk the elements below, those of a tag or class."""
        for child in self.children:
            if isinstance(child, Node):
                classes = child.attributes.get("class", "").split()
                if tag in ("", child.tag) and (not class_ or class_ in classes):
                    yield child
                yield from child.all(tag, class_)

    def one(self, tag: str = "", class_: str = "") -> "Node":
        return next(self.all(tag, class_))

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Node("document")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute of <{tag}> is there twice"
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(page: str) -> Node:
    """Read a page or a part of one."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert len(reader.open) == 1, f"<{reader.open[-1].tag}> is not closed"
    return reader.open[0]
