//! ISA-L, Intel's library for erasure coding, called through its C interface.
//!
//! It is looked for when the benchmark starts, so that nothing needs it to build: `libisal.so.2`,
//! or the file that `ISAL_LIBRARY` names.
//!
//! Invariant, kept by the functions here for the C ones: the pointers of one call are to as many
//! bytes as the call says, and tables are of as many sources and outputs.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

/// Sources and outputs of one call.
const CHUNKS_MAX: usize = 64;

/// Bytes of a table for one factor (`erasure_code.h`).
const TABLE_BYTES: usize = 32;

/// Arrays of pointers as C wants them; it does not write to sources.
type Pointers = [*mut u8; CHUNKS_MAX];

/// Of `raid.h`: count of pointers, length in bytes, pointers to sources and then to outputs.
type Generate = unsafe extern "C" fn(c_int, c_int, *mut *mut u8) -> c_int;

/// The functions of `raid.h` and `erasure_code.h` that are compared with ours.
pub struct Isal {
    xor_gen: Generate,
    pq_gen: Generate,
    ec_init_tables: unsafe extern "C" fn(c_int, c_int, *const u8, *mut u8),
    ec_encode_data_update:
        unsafe extern "C" fn(c_int, c_int, c_int, c_int, *const u8, *const u8, *mut *mut u8),
    ec_encode_data:
        unsafe extern "C" fn(c_int, c_int, c_int, *const u8, *mut *mut u8, *mut *mut u8),
    gf_invert_matrix: unsafe extern "C" fn(*mut u8, *mut u8, c_int) -> c_int,
}

/// Factors of every source in every output, as `ec_encode_data` wants them.
pub struct Tables {
    sources: usize,
    outputs: usize,
    bytes: Vec<u8>,
}

impl Isal {
    /// None if there is no such library here.
    pub fn load() -> Option<Isal> {
        let name = std::env::var("ISAL_LIBRARY").unwrap_or("libisal.so.2".into());
        let name = CString::new(name).expect("no zero byte in the name");
        // SAFETY: `name` ends with a zero byte; the library's initialisers do nothing.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            return None;
        }
        // SAFETY: the library is never closed, and these are the types in its headers.
        unsafe {
            Some(Isal {
                xor_gen: symbol(library, c"xor_gen"),
                pq_gen: symbol(library, c"pq_gen"),
                ec_init_tables: symbol(library, c"ec_init_tables"),
                ec_encode_data_update: symbol(library, c"ec_encode_data_update"),
                ec_encode_data: symbol(library, c"ec_encode_data"),
                gf_invert_matrix: symbol(library, c"gf_invert_matrix"),
            })
        }
    }

    /// The file that was loaded, which says the version.
    pub fn path(&self) -> String {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let mut paths = maps.split_whitespace().filter(|word| word.contains("libisal"));
        let path = paths.next().unwrap_or("ISA-L");
        std::fs::canonicalize(path).map_or(path.into(), |path| path.display().to_string())
    }

    /// `output` = sum of `sources`; all are aligned to 32 bytes.
    pub fn xor(&self, sources: &[&[u8]], output: &mut [u8]) {
        let (mut pointers, length) = pointers(sources, &mut [output]);
        generate(self.xor_gen, &mut pointers[..sources.len() + 1], length);
    }

    /// `into` += sum of `sources`; all are aligned to 32 bytes.
    pub fn xor_into(&self, sources: &[&[u8]], into: &mut [u8]) {
        let (mut pointers, length) = pointers(sources, &mut [into]);
        // The output is a source as well: each block of it is read before it is written.
        pointers[sources.len() + 1] = pointers[sources.len()];
        generate(self.xor_gen, &mut pointers[..sources.len() + 2], length);
    }

    /// P and Q of `sources`; all are aligned to 32 bytes.
    pub fn pq(&self, sources: &[&[u8]], p: &mut [u8], q: &mut [u8]) {
        let (mut pointers, length) = pointers(sources, &mut [p, q]);
        generate(self.pq_gen, &mut pointers[..sources.len() + 2], length);
    }

    /// `rows[o][s]` is the factor of source s in output o.
    pub fn tables(&self, rows: &[Vec<u8>]) -> Tables {
        let (outputs, sources) = (rows.len(), rows[0].len());
        let factors = rows.concat();
        assert!(factors.len() == outputs * sources);
        let mut bytes = vec![0; factors.len() * TABLE_BYTES];
        // SAFETY: there is a factor, and room for a table, for each pair of source and output.
        unsafe {
            (self.ec_init_tables)(int(sources), int(outputs), factors.as_ptr(), bytes.as_mut_ptr());
        }
        Tables { sources, outputs, bytes }
    }

    /// `outputs` = the sums of `sources` that `tables` were made for.
    pub fn combine(&self, tables: &Tables, sources: &[&[u8]], outputs: &mut [&mut [u8]]) {
        assert!(tables.sources == sources.len());
        assert!(tables.outputs == outputs.len());
        let (mut from, length) = pointers(sources, outputs);
        let (from, into) = from.split_at_mut(sources.len());
        // SAFETY: tables and both lists of pointers, each to `length` bytes, are as long as said.
        unsafe {
            (self.ec_encode_data)(
                int(length),
                int(sources.len()),
                int(outputs.len()),
                tables.bytes.as_ptr(),
                from.as_mut_ptr(),
                into.as_mut_ptr(),
            );
        }
    }

    /// `outputs` += source `index`, which is `source`, times its factors.
    pub fn mul_add(&self, tables: &Tables, index: usize, source: &[u8], outputs: &mut [&mut [u8]]) {
        assert!(index < tables.sources);
        assert!(tables.outputs == outputs.len());
        let (mut pointers, length) = pointers(&[source], outputs);
        // SAFETY: tables and the list of outputs, each of `length` bytes, are as long as said.
        unsafe {
            (self.ec_encode_data_update)(
                int(length),
                int(tables.sources),
                int(outputs.len()),
                int(index),
                tables.bytes.as_ptr(),
                source.as_ptr(),
                pointers[1..].as_mut_ptr(),
            );
        }
    }

    /// The inverse of a square matrix of `size` rows, one after the other.
    pub fn invert(&self, mut matrix: Vec<u8>, size: usize) -> Vec<u8> {
        assert!(matrix.len() == size * size);
        let mut inverse = vec![0; matrix.len()];
        // SAFETY: both matrices are of `size` times `size` bytes.
        let failed = unsafe {
            (self.gf_invert_matrix)(matrix.as_mut_ptr(), inverse.as_mut_ptr(), int(size))
        };
        assert!(failed == 0, "these losses cannot be solved");
        inverse
    }
}

/// Calls `function`; `pointers` are to `length` bytes each.
fn generate(function: Generate, pointers: &mut [*mut u8], length: usize) {
    let count = pointers.len();
    // SAFETY: `pointers` made them, of slices of that length; outputs, which come last, are ours
    // to write.
    let failed = unsafe { function(int(count), int(length), pointers.as_mut_ptr()) };
    assert!(failed == 0, "ISA-L refused {count} vectors");
}

/// Pointers to sources, then to outputs; and the length that all have.
fn pointers(sources: &[&[u8]], outputs: &mut [&mut [u8]]) -> (Pointers, usize) {
    let length = sources[0].len();
    assert!(sources.iter().all(|source| source.len() == length));
    assert!(outputs.iter().all(|output| output.len() == length));
    assert!(sources.len() + outputs.len() <= CHUNKS_MAX);
    let mut pointers = [std::ptr::null_mut(); CHUNKS_MAX];
    for (pointer, source) in pointers.iter_mut().zip(sources) {
        *pointer = source.as_ptr().cast_mut();
    }
    for (pointer, output) in pointers[sources.len()..].iter_mut().zip(outputs) {
        *pointer = output.as_mut_ptr();
    }
    (pointers, length)
}

fn int(count: usize) -> c_int {
    c_int::try_from(count).expect("small")
}

/// # Safety
///
/// `F` is the type of the function of this name, and the library stays open.
unsafe fn symbol<F: Copy>(library: *mut c_void, name: &CStr) -> F {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    let name: *const c_char = name.as_ptr();
    // SAFETY: `name` ends with a zero byte.
    let address = unsafe { libc::dlsym(library, name) };
    assert!(!address.is_null(), "ISA-L without a function that it should have");
    // SAFETY: `address` is that of an `F`, by the caller's word.
    unsafe { std::mem::transmute_copy(&address) }
}
