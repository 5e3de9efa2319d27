//! Names of drives, arrays, volumes and exports.

use std::path::Path;

use crate::refusal::{Answer, Refusal};

pub const NAME_BYTES_MAX: usize = 63;

fn is_allowed(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')
}

/// Refuses what cannot be the name of a `noun`. A name appears in paths, tables and options.
pub fn check_name(noun: &str, name: &str) -> Answer<()> {
    let good = (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.chars().all(is_allowed)
        && !name.starts_with(['-', '.']);
    if good {
        return Ok(());
    }
    Err(Refusal::invalid(format!("{name:?} cannot be the name of {noun}")).fix(format!(
        "use 1 to {NAME_BYTES_MAX} of A-Z a-z 0-9 . _ - and begin with a letter, digit or _"
    )))
}

/// A name for what lives at `path`: `nvme0n1` for `/dev/nvme0n1`, `d0` for `/srv/d0.img`.
pub fn name_from_path(path: &Path) -> Option<String> {
    let stem = path.file_stem()?.to_str()?;
    let name: String = stem.chars().map(|c| if is_allowed(c) { c } else { '-' }).collect();
    let name = name.trim_start_matches(['-', '.']);
    let name: String = name.chars().take(NAME_BYTES_MAX).collect();
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["d0", "nvme0n1", "a.b_c-d", "0", &"x".repeat(63)] {
            assert_eq!(check_name("a drive", good), Ok(()), "{good}");
        }
        for bad in ["", " ", "a b", "a/b", "-x", ".x", "ä", "a\n", &"x".repeat(64)] {
            assert!(check_name("a drive", bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn names_from_paths() {
        let name = |path: &str| name_from_path(Path::new(path));
        assert_eq!(name("/dev/nvme0n1").as_deref(), Some("nvme0n1"));
        assert_eq!(name("/srv/d 0.img").as_deref(), Some("d-0"));
        assert_eq!(name("/"), None);
    }
}
