//! Placeholder.

#[derive(Debug, Default)]
pub struct Report {
    pub cases: u64,
    pub failures: Vec<String>,
}

pub fn run(_stride: u64) -> Report {
    Report::default()
}
