"""The chapters under names that Python can import: `course.ddp` is the folder 03_ddp, and so on.

A folder's name that begins with a digit cannot stand in an import statement. So each chapter has a second name here,
a symbolic link, and every file of a chapter is imported by that name only: by notebooks, by scripts started from any
folder, by ranks that torchrun or `launch` started, by unpickling, and by an editor that looks for a definition. One
name means one module, and one copy of every class. docs/architecture.md says more.
"""
