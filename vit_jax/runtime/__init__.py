"""What a run needs beside its step: processes, phases, files, progress."""
