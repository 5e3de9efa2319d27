//! Diffie-Hellman groups (Base 8.13.5.2): those of RFC 7919, or none.

use std::sync::LazyLock;

use crypto_bigint::modular::{BoxedMontyForm, BoxedMontyParams};
use crypto_bigint::{BoxedUint, Limb, NonZero, Odd};
use zeroize::Zeroizing;

/// Bytes of an exponent: no group needs more than 400 bits (RFC 7919, 5.2).
pub(super) const EXPONENT_BYTES: usize = 64;
const EXPONENT_BITS: u32 = 512;
const _: () = assert!(8 * EXPONENT_BYTES == EXPONENT_BITS as usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Group {
    /// A challenge is answered as it is.
    Null = 0,
    Ffdhe2048 = 1,
    Ffdhe3072 = 2,
    Ffdhe4096 = 3,
    Ffdhe6144 = 4,
    Ffdhe8192 = 5,
}

impl Group {
    pub const ALL: [Group; 6] = [
        Group::Null,
        Group::Ffdhe2048,
        Group::Ffdhe3072,
        Group::Ffdhe4096,
        Group::Ffdhe6144,
        Group::Ffdhe8192,
    ];

    pub(super) fn from_byte(byte: u8) -> Option<Group> {
        Group::ALL.into_iter().find(|its| *its as u8 == byte)
    }

    /// Bytes of a public value, and of what both sides come to.
    pub(super) fn bytes(self) -> usize {
        self.modulus().map_or(0, |modulus| modulus.bits_precision() as usize / 8)
    }

    #[cfg(test)]
    pub(super) fn modulus_bytes(self) -> Vec<u8> {
        self.modulus().map_or(Vec::new(), |its| its.modulus().as_ref().to_be_bytes().into_vec())
    }

    fn modulus(self) -> Option<&'static BoxedMontyParams> {
        static FFDHE2048: LazyLock<BoxedMontyParams> = LazyLock::new(|| modulus(2048, 560_316));
        static FFDHE3072: LazyLock<BoxedMontyParams> = LazyLock::new(|| modulus(3072, 2_625_351));
        static FFDHE4096: LazyLock<BoxedMontyParams> = LazyLock::new(|| modulus(4096, 5_736_041));
        static FFDHE6144: LazyLock<BoxedMontyParams> = LazyLock::new(|| modulus(6144, 15_705_020));
        static FFDHE8192: LazyLock<BoxedMontyParams> = LazyLock::new(|| modulus(8192, 10_965_728));
        Some(match self {
            Group::Null => return None,
            Group::Ffdhe2048 => &FFDHE2048,
            Group::Ffdhe3072 => &FFDHE3072,
            Group::Ffdhe4096 => &FFDHE4096,
            Group::Ffdhe6144 => &FFDHE6144,
            Group::Ffdhe8192 => &FFDHE8192,
        })
    }
}

/// 2^b − 2^(b−64) + (⌊2^(b−130) · e⌋ + x) · 2^64 − 1 (RFC 7919, appendix A).
fn modulus(bits: u32, x: u64) -> BoxedMontyParams {
    // Digits of e beyond those that count, for what is rounded off.
    const GUARD_BITS: u32 = 64;
    let power = |exponent| BoxedUint::one_with_precision(bits).shl(exponent);
    let zero = BoxedUint::zero_with_precision(bits);
    // e is the sum of 1/n!.
    let (mut e, mut part) = (zero.clone(), power(bits - 130 + GUARD_BITS));
    let mut n = 0;
    while part != zero {
        e = e.wrapping_add(&part);
        n += 1;
        let divisor = NonZero::new(Limb::from_u32(n)).expect("counted from 1");
        part = part.div_rem_limb(divisor).0;
    }
    let middle = e.shr(GUARD_BITS).wrapping_add(BoxedUint::from(x)).shl(64);
    // 2^b is 0 here.
    let modulus = middle.wrapping_sub(power(bits - 64)).wrapping_sub(BoxedUint::one());
    BoxedMontyParams::new_vartime(Odd::new(modulus).expect("one less than a multiple of 2^64"))
}

/// What one side draws, and tells nobody.
pub(super) struct Exponent {
    group: Group,
    bytes: Zeroizing<[u8; EXPONENT_BYTES]>,
}

impl Exponent {
    pub(super) fn new(group: Group, bytes: Zeroizing<[u8; EXPONENT_BYTES]>) -> Exponent {
        Exponent { group, bytes }
    }

    /// What the other side is told; empty without a group.
    pub(super) fn public(&self) -> Vec<u8> {
        let Some(modulus) = self.group.modulus() else { return Vec::new() };
        // 2 is the generator of all.
        let generator = BoxedUint::one_with_precision(modulus.bits_precision()).shl(1);
        self.power(generator, modulus).to_vec()
    }

    /// What both sides come to, by what the other side has told; `None` without a group. An error:
    /// that is none of the group's, or one that would give the exponent's result away (RFC 7919,
    /// 5.1).
    pub(super) fn agree(&self, theirs: &[u8]) -> Result<Option<Zeroizing<Vec<u8>>>, NotInGroup> {
        let Some(modulus) = self.group.modulus() else {
            return if theirs.is_empty() { Ok(None) } else { Err(NotInGroup) };
        };
        if theirs.len() != self.group.bytes() {
            return Err(NotInGroup);
        }
        let bits = modulus.bits_precision();
        let public = BoxedUint::from_be_slice(theirs, bits).map_err(|_| NotInGroup)?;
        let one = BoxedUint::one_with_precision(bits);
        let last = modulus.modulus().as_ref().wrapping_sub(&one);
        if public <= one || public >= last {
            return Err(NotInGroup);
        }
        Ok(Some(self.power(public, modulus)))
    }

    fn power(&self, base: BoxedUint, modulus: &BoxedMontyParams) -> Zeroizing<Vec<u8>> {
        let exponent = BoxedUint::from_be_slice(&*self.bytes, EXPONENT_BITS);
        let exponent = Zeroizing::new(exponent.expect("as long as it says"));
        let power = BoxedMontyForm::new(base, modulus).pow(&exponent).retrieve();
        Zeroizing::new(Zeroizing::new(power).to_be_bytes().into_vec())
    }
}

/// A public value that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotInGroup;
