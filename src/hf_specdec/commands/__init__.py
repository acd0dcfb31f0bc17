"""The commands of `hf-specdec`, one file each. They are imported when they run, so that `--help` loads no model library."""
