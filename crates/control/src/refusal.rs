//! Why something was not done, in words for the operator: what is wrong, and what mends it.

/// Which kind of trouble; decides the HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalKind {
    /// What was asked for makes no sense.
    Invalid,
    /// Nothing has this name.
    Unknown,
    /// It makes sense, but not now.
    Conflict,
    /// There is no room for it.
    NoSpace,
    /// The machine under us failed.
    Failed,
}

impl RefusalKind {
    pub fn http_status(self) -> u16 {
        match self {
            RefusalKind::Invalid => 400,
            RefusalKind::Unknown => 404,
            RefusalKind::Conflict => 409,
            RefusalKind::NoSpace => 507,
            RefusalKind::Failed => 500,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct Refusal {
    pub kind: RefusalKind,
    pub error: String,
    pub fix: Option<String>,
    /// It may be gone in a moment, without anything being done here.
    pub may_pass: bool,
    /// Of a start: the array has been taken for it, and has our lease.
    pub has_lease: bool,
}

impl Refusal {
    fn new(kind: RefusalKind, error: impl Into<String>) -> Refusal {
        Refusal { kind, error: error.into(), fix: None, may_pass: false, has_lease: false }
    }

    pub fn invalid(error: impl Into<String>) -> Refusal {
        Refusal::new(RefusalKind::Invalid, error)
    }

    pub fn unknown(error: impl Into<String>) -> Refusal {
        Refusal::new(RefusalKind::Unknown, error)
    }

    pub fn conflict(error: impl Into<String>) -> Refusal {
        Refusal::new(RefusalKind::Conflict, error)
    }

    pub fn no_space(error: impl Into<String>) -> Refusal {
        Refusal::new(RefusalKind::NoSpace, error)
    }

    pub fn failed(error: impl Into<String>) -> Refusal {
        Refusal::new(RefusalKind::Failed, error)
    }

    #[must_use]
    pub fn fix(mut self, fix: impl Into<String>) -> Refusal {
        self.fix = Some(fix.into());
        self
    }

    /// One line with both, for logs and notes.
    pub fn line(&self) -> String {
        match &self.fix {
            Some(fix) => format!("{}; {fix}", self.error),
            None => self.error.clone(),
        }
    }
}

pub type Answer<T> = Result<T, Refusal>;
