"""Jobs: how a script is started, and which engine ran it. Weak and strong scaling, and the steps in
which time is lost, are measured on launched ranks."""
