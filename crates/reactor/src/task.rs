//! Names of tasks: what wait lists, timers and slots remember.

/// Names a task of one reactor. Reused after the task has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TaskId(pub(crate) u32);
