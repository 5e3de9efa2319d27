//! A data structure that a host reads, by the offsets that the specification gives its fields.

/// `N` bytes, zero where nothing was put.
pub(crate) struct Page<const N: usize>(pub(crate) [u8; N]);

impl<const N: usize> Page<N> {
    pub(crate) fn new() -> Page<N> {
        Page([0; N])
    }

    /// Panics if it does not fit: the places are known when this is written.
    pub(crate) fn put<const LEN: usize>(&mut self, at: usize, bytes: [u8; LEN]) -> &mut Page<N> {
        self.0[at..at + LEN].copy_from_slice(&bytes);
        self
    }

    pub(crate) fn u8(&mut self, at: usize, value: u8) -> &mut Page<N> {
        self.put(at, [value])
    }

    pub(crate) fn u16(&mut self, at: usize, value: u16) -> &mut Page<N> {
        self.put(at, value.to_le_bytes())
    }

    pub(crate) fn u32(&mut self, at: usize, value: u32) -> &mut Page<N> {
        self.put(at, value.to_le_bytes())
    }

    pub(crate) fn u64(&mut self, at: usize, value: u64) -> &mut Page<N> {
        self.put(at, value.to_le_bytes())
    }
}
