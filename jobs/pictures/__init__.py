"""Pictures and pages of reports: plots by matplotlib (`plots.py`), pages of one template (`page.py`)."""
