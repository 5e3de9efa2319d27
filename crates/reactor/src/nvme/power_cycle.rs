//! Since when what is behind a namespace has power: whoever comes back to one learns whether its
//! volatile cache can have lost anything.
//!
//! Base has no field for that. Targets of Ashlar put it into what Identify Namespace leaves to
//! vendors (NVM figure 97):
//!
//! | bytes | |
//! |---|---|
//! | 384–391 | `ASHLARPC` |
//! | 392–407 | another number after each loss of power; not zero |

use crate::nvme::command::IDENTIFY_BYTES;

const AT: usize = 384;
const MAGIC: [u8; 8] = *b"ASHLARPC";

/// While it is the same, nothing is lost of what was acknowledged, flushed or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PowerCycle([u8; 16]);

impl PowerCycle {
    /// `None` for zero.
    pub fn new(number: [u8; 16]) -> Option<PowerCycle> {
        (number != [0; 16]).then_some(PowerCycle(number))
    }

    pub fn number(self) -> [u8; 16] {
        self.0
    }

    /// `page`: of Identify Namespace. `None`: it does not say, as of most vendors' targets.
    pub fn read(page: &[u8; IDENTIFY_BYTES]) -> Option<PowerCycle> {
        let number = page[AT..].strip_prefix(&MAGIC)?.first_chunk()?;
        PowerCycle::new(*number)
    }

    pub fn write(self, page: &mut [u8; IDENTIFY_BYTES]) {
        let (magic, rest) = page[AT..].split_at_mut(MAGIC.len());
        magic.copy_from_slice(&MAGIC);
        rest[..self.0.len()].copy_from_slice(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_read_as_it_was_written_and_of_others_it_is_not_there() {
        let mut page = [0; IDENTIFY_BYTES];
        assert_eq!(PowerCycle::read(&page), None);
        let cycle = PowerCycle::new([5; 16]).unwrap();
        cycle.write(&mut page);
        assert_eq!(PowerCycle::read(&page), Some(cycle));
        page[AT + MAGIC.len()..][..16].fill(0);
        assert_eq!(PowerCycle::read(&page), None);
        // What another vendor has there.
        page[AT..].fill(0xff);
        assert_eq!(PowerCycle::read(&page), None);
    }
}
