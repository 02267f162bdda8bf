"""A folder of galleries: how they come and go, are opened, and exchange their names."""
