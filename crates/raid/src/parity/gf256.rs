//! Arithmetic in GF(2^8), the field of bytes in which RAID 6 is computed.
//!
//! Polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d), generator 2, as in H. P. Anvin, "The mathematics
//! of RAID-6". Addition is exclusive or. These functions serve table building and the small systems
//! of equations of a recovery; bytes in bulk go through the kernels, which use the tables here.
//!
//! Invariant: everything is computed at compile time from `POLYNOMIAL`; there is no second place
//! where the field could be defined differently.

/// The bits of the reduction polynomial, x^8 included.
const POLYNOMIAL: u16 = 0x11d;

/// Nonzero elements, and so the period of the powers of the generator.
pub(super) const ORDER: usize = 255;

/// `POWERS[i]` is 2^i.
const POWERS: [u8; ORDER] = powers();

/// `LOGARITHMS[2^i]` is i; `LOGARITHMS[0]` is never read.
const LOGARITHMS: [u8; 256] = logarithms();

/// `NIBBLE_PRODUCTS[factor]` holds `factor` times 0x00..=0x0f, then `factor` times 0x00, 0x10 ..=
/// 0xf0: a byte is the sum of its halves, so its product is the sum of one entry of each half.
pub(super) static NIBBLE_PRODUCTS: [[[u8; 16]; 2]; 256] = nibble_products();

/// `a` times `b`.
pub(super) const fn multiply(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        return 0;
    }
    let exponent = LOGARITHMS[a as usize] as usize + LOGARITHMS[b as usize] as usize;
    POWERS[exponent % ORDER]
}

/// What multiplies bytes by `factor`: without branches, for many.
pub(super) fn times(factor: u8) -> impl Fn(u8) -> u8 {
    let [low, high] = &NIBBLE_PRODUCTS[usize::from(factor)];
    |byte| low[usize::from(byte & 15)] ^ high[usize::from(byte >> 4)]
}

/// The element that times `a` is one. Panics for zero, which has none.
pub(super) const fn inverse(a: u8) -> u8 {
    assert!(a != 0);
    POWERS[(ORDER - LOGARITHMS[a as usize] as usize) % ORDER]
}

/// The generator 2 to the power of `exponent`.
pub(super) const fn power(exponent: usize) -> u8 {
    POWERS[exponent % ORDER]
}

const fn powers() -> [u8; ORDER] {
    let mut table = [0; ORDER];
    let mut value: u8 = 1;
    let mut exponent = 0;
    while exponent < ORDER {
        table[exponent] = value;
        value = double(value);
        exponent += 1;
    }
    // A generator comes back to one after all the others, and not before.
    assert!(value == 1);
    table
}

const fn double(a: u8) -> u8 {
    let [_, reduction] = POLYNOMIAL.to_be_bytes();
    if a & 0x80 == 0 { a << 1 } else { (a << 1) ^ reduction }
}

const fn logarithms() -> [u8; 256] {
    let mut table = [0; 256];
    let mut exponent: u8 = 0;
    while (exponent as usize) < ORDER {
        table[POWERS[exponent as usize] as usize] = exponent;
        exponent += 1;
    }
    table
}

const fn nibble_products() -> [[[u8; 16]; 2]; 256] {
    let mut table = [[[0; 16]; 2]; 256];
    let mut factor: u8 = 0;
    loop {
        let mut nibble: u8 = 0;
        while nibble < 16 {
            table[factor as usize][0][nibble as usize] = multiply(factor, nibble);
            table[factor as usize][1][nibble as usize] = multiply(factor, nibble << 4);
            nibble += 1;
        }
        if factor == 255 {
            return table;
        }
        factor += 1;
    }
}

#[cfg(test)]
mod tests {
    //! Goal: the field is the one of RAID 6.
    //! Method: all pairs against long multiplication, written here without tables.

    use super::*;

    /// Shift and add in 16 bits, then divide by the polynomial.
    fn multiply_slowly(a: u8, b: u8) -> u8 {
        let mut product: u16 = 0;
        for bit in 0..8 {
            if b >> bit & 1 == 1 {
                product ^= u16::from(a) << bit;
            }
        }
        for bit in (8..16).rev() {
            if product >> bit & 1 == 1 {
                product ^= 0b1_0001_1101 << (bit - 8);
            }
        }
        u8::try_from(product).unwrap()
    }

    #[test]
    fn all_products() {
        for a in 0..=255 {
            for b in 0..=255 {
                let expected = multiply_slowly(a, b);
                assert_eq!(multiply(a, b), expected, "{a} * {b}");
                assert_eq!(times(a)(b), expected, "nibbles of {a} * {b}");
            }
        }
    }

    #[test]
    fn all_inverses() {
        for a in 1..=255 {
            assert_eq!(multiply_slowly(a, inverse(a)), 1, "inverse of {a}");
        }
    }

    #[test]
    fn all_powers() {
        let mut expected = 1;
        for exponent in 0..2 * ORDER {
            assert_eq!(power(exponent), expected, "2^{exponent}");
            expected = multiply_slowly(expected, 2);
        }
    }

    #[test]
    #[should_panic(expected = "a != 0")]
    fn zero_has_no_inverse() {
        inverse(0);
    }
}
