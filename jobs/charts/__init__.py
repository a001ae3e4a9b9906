"""Charts and HTML reports: plots with matplotlib (`plots.py`), pages from one template (`report_page.py`)."""
