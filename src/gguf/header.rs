//! One file's header: magic, metadata (passed over but for what is asked for), and the table of tensors.

use super::error::GgufError;
use super::types::Type;
use std::collections::BTreeMap;
use std::io::{BufReader, Read, Seek};

const MAGIC: &[u8; 4] = b"GGUF";
/// Versions that differ in nothing we read.
const VERSIONS: [u32; 2] = [2, 3];
/// Metadata and tensor table together; tokenizers take a few MiB.
const MAX_HEADER_BYTES: u64 = 256 << 20;
/// The largest models have a few thousand.
const MAX_TENSORS: u64 = 100_000;
/// Metadata entries; models have a few dozen.
const MAX_ENTRIES: u64 = 100_000;
/// Of a key; GGUF's own limit.
const MAX_KEY_BYTES: u64 = 65_535;
/// Of a tensor's name; `GGML_MAX_NAME` less its NUL.
const MAX_NAME_BYTES: u64 = 63;
/// `GGML_MAX_DIMS`.
const MAX_DIMS: u32 = 4;
/// Where a file does not say.
const DEFAULT_ALIGNMENT: u64 = 32;
/// More parts than any split model has.
const MAX_PARTS: u64 = 10_000;

/// Of a text in the metadata that is kept; names are far shorter.
const MAX_FACT_BYTES: u64 = 4096;
/// Of a list in the metadata that is kept: one number per block.
const MAX_FACT_NUMBERS: u64 = 4096;
/// Keys whose values are kept.
const GENERAL_FACTS: [&str; 3] = ["general.architecture", "general.name", "general.type"];
/// Ends of keys whose values are kept; an architecture's name comes before them.
const MODEL_FACTS: [&str; 8] = [
    ".block_count",
    ".nextn_predict_layers",
    ".embedding_length",
    ".expert_used_count",
    ".attention.head_count",
    ".attention.head_count_kv",
    ".attention.key_length",
    ".attention.value_length",
];

/// A value of the metadata. Values of other kinds are passed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// A text.
    Text(String),
    /// A whole number, 0 or more.
    Number(u64),
    /// One number per block.
    Numbers(Vec<u64>),
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub kind: &'static Type,
    /// Shape in ggml order, filled up with ones.
    pub shape: [u64; 4],
    /// Dimensions the file gives, 0 to 4.
    pub n_dims: u32,
    /// Where its data begins, in bytes from the file's start.
    pub offset: u64,
    /// Size of its data in bytes, below 2^63.
    pub n_bytes: u64,
}

/// What one file says of itself.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Files that the model is split into, 1 if it is not.
    pub n_parts: u64,
    /// By name.
    pub tensors: BTreeMap<String, TensorInfo>,
    /// What the metadata says of the model, by key.
    pub facts: BTreeMap<String, Fact>,
}

impl Header {
    /// Reads the header of a file of `len` bytes from its start.
    pub fn read(file: impl Read + Seek, len: u64) -> Result<Self, GgufError> {
        let mut source = Source { inner: BufReader::new(file), at: 0, end: len.min(MAX_HEADER_BYTES) };
        let magic = source.bytes::<4>()?;
        if &magic != MAGIC {
            return Err(GgufError::Magic(String::from_utf8_lossy(&magic).into_owned()));
        }
        let version = source.u32()?;
        if !VERSIONS.contains(&version) {
            return Err(GgufError::Version(version));
        }
        let n_tensors = source.at_most("tensors", MAX_TENSORS)?;
        let n_entries = source.at_most("metadata entries", MAX_ENTRIES)?;
        let (mut alignment, mut n_parts, mut facts) = (DEFAULT_ALIGNMENT, 1, BTreeMap::new());
        for _ in 0..n_entries {
            let key = source.text("bytes of a key", MAX_KEY_BYTES)?;
            match key.as_str() {
                "general.alignment" => alignment = source.whole_number(key)?,
                "split.count" => n_parts = source.whole_number(key)?.max(1),
                _ if is_fact(&key) => {
                    if let Some(fact) = source.fact(&key)? {
                        facts.insert(key, fact);
                    }
                }
                _ => source.skip_value(key)?,
            }
        }
        if !alignment.is_power_of_two() {
            return Err(GgufError::Alignment(alignment));
        }
        check_limit("parts", n_parts, MAX_PARTS)?;
        let tensors = read_tensors(&mut source, n_tensors, alignment)?;
        Ok(Self { n_parts, tensors, facts })
    }
}

fn is_fact(key: &str) -> bool {
    GENERAL_FACTS.contains(&key) || MODEL_FACTS.iter().any(|end| key.ends_with(end))
}

/// The table of tensors, which is the header's end; the data begins at the next multiple of the alignment.
fn read_tensors<R: Read + Seek>(
    source: &mut Source<R>,
    n_tensors: u64,
    alignment: u64,
) -> Result<BTreeMap<String, TensorInfo>, GgufError> {
    let mut tensors = BTreeMap::new();
    for _ in 0..n_tensors {
        let name = source.text("bytes of a tensor's name", MAX_NAME_BYTES)?;
        let info = read_tensor(source, &name)?;
        if tensors.contains_key(&name) {
            return Err(GgufError::Duplicate(name));
        }
        tensors.insert(name, info);
    }
    let data = source.at.checked_next_multiple_of(alignment).ok_or(GgufError::Alignment(alignment))?;
    for (name, info) in &mut tensors {
        let offset = info.offset.checked_add(data).filter(|offset| offset.checked_add(info.n_bytes).is_some());
        info.offset = offset.ok_or_else(|| GgufError::Shape { name: name.clone(), shape: info.shape })?;
    }
    Ok(tensors)
}

/// One row of the table; its offset counts from where the data begins.
fn read_tensor<R: Read + Seek>(source: &mut Source<R>, name: &str) -> Result<TensorInfo, GgufError> {
    let n_dims = source.u32()?;
    check_limit("dimensions of a tensor", n_dims.into(), MAX_DIMS.into())?;
    let mut shape = [1; 4];
    for n in shape.iter_mut().take(n_dims as usize) {
        *n = source.u64()?;
    }
    let id = source.u32()?;
    let kind = Type::of(id).ok_or_else(|| GgufError::Type { name: name.to_owned(), id })?;
    let n_bytes = size(kind, shape).ok_or_else(|| GgufError::Shape { name: name.to_owned(), shape })?;
    Ok(TensorInfo { kind, shape, n_dims, offset: source.u64()?, n_bytes })
}

/// Bytes of a tensor, as `ggml_nbytes` counts them. `None` if blocks are not whole or the size is 2^63 and more.
fn size(kind: &Type, shape: [u64; 4]) -> Option<u64> {
    if !shape[0].is_multiple_of(kind.block) {
        return None;
    }
    let bytes = shape[1..].iter().try_fold(shape[0] / kind.block, |product, &n| product.checked_mul(n));
    bytes?.checked_mul(kind.bytes).filter(|&bytes| i64::try_from(bytes).is_ok())
}

/// Reads forward and knows where it is; never beyond `end`.
struct Source<R> {
    inner: BufReader<R>,
    at: u64,
    end: u64,
}

impl<R: Read + Seek> Source<R> {
    /// Moves on by `n` bytes, if there are so many.
    fn advance(&mut self, n: u64) -> Result<(), GgufError> {
        let to = self.at.checked_add(n).filter(|&to| to <= self.end).ok_or(GgufError::Truncated(self.end))?;
        self.at = to;
        Ok(())
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        self.advance(N as u64)?;
        let mut bytes = [0; N];
        self.inner.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, GgufError> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, GgufError> {
        self.bytes().map(u64::from_le_bytes)
    }

    fn at_most(&mut self, what: &'static str, max: u64) -> Result<u64, GgufError> {
        let value = self.u64()?;
        check_limit(what, value, max)?;
        Ok(value)
    }

    fn skip(&mut self, n: u64) -> Result<(), GgufError> {
        self.advance(n)?;
        let n = i64::try_from(n).map_err(|_| GgufError::Truncated(self.end))?;
        Ok(self.inner.seek_relative(n)?)
    }

    fn text(&mut self, what: &'static str, max: u64) -> Result<String, GgufError> {
        let len = self.at_most(what, max)?;
        self.advance(len)?;
        let mut bytes = vec![0; len as usize]; // at most MAX_KEY_BYTES
        self.inner.read_exact(&mut bytes)?;
        String::from_utf8(bytes).map_err(|_| GgufError::NotText)
    }

    fn skip_text(&mut self) -> Result<(), GgufError> {
        let len = self.u64()?;
        self.skip(len)
    }

    fn skip_value(&mut self, key: String) -> Result<(), GgufError> {
        let kind = self.u32()?;
        self.skip_value_of(key, kind)
    }

    fn skip_value_of(&mut self, key: String, kind: u32) -> Result<(), GgufError> {
        match kind {
            STRING => self.skip_text(),
            ARRAY => {
                let (kind, n) = (self.u32()?, self.u64()?);
                self.skip_array(key, kind, n)
            }
            _ => self.skip(scalar_bytes(kind).ok_or(GgufError::Kind { key, kind, expected: "0 to 12" })?),
        }
    }

    fn skip_array(&mut self, key: String, kind: u32, n: u64) -> Result<(), GgufError> {
        if kind == STRING {
            return (0..n).try_for_each(|_| self.skip_text()); // each takes bytes of the file: ends with it
        }
        let bytes = scalar_bytes(kind).ok_or(GgufError::Kind { key, kind, expected: "no list in a list" })?;
        self.skip(n.checked_mul(bytes).ok_or(GgufError::Truncated(self.end))?)
    }

    /// A value that is kept; `None`, and passed over, where it is of another kind or too long.
    fn fact(&mut self, key: &str) -> Result<Option<Fact>, GgufError> {
        let kind = self.u32()?;
        match kind {
            STRING => {
                let len = self.u64()?;
                if len > MAX_FACT_BYTES {
                    return self.skip(len).map(|()| None);
                }
                self.advance(len)?;
                let mut bytes = vec![0; len as usize]; // at most MAX_FACT_BYTES
                self.inner.read_exact(&mut bytes)?;
                Ok(Some(Fact::Text(String::from_utf8_lossy(&bytes).into_owned())))
            }
            ARRAY => {
                let (kind, n) = (self.u32()?, self.u64()?);
                if integer_bytes(kind).is_none() || n > MAX_FACT_NUMBERS {
                    return self.skip_array(key.to_owned(), kind, n).map(|()| None);
                }
                let numbers = (0..n).map(|_| self.integer(kind)).collect::<Result<Option<_>, _>>()?;
                Ok(numbers.map(Fact::Numbers))
            }
            _ if integer_bytes(kind).is_some() => Ok(self.integer(kind)?.map(Fact::Number)),
            _ => self.skip_value_of(key.to_owned(), kind).map(|()| None),
        }
    }

    /// A whole number of a type that [`integer_bytes`] knows; `None` if it is negative.
    fn integer(&mut self, kind: u32) -> Result<Option<u64>, GgufError> {
        Ok(match kind {
            UINT8 => Some(self.bytes::<1>()?[0].into()),
            INT8 => u64::try_from(self.bytes().map(i8::from_le_bytes)?).ok(),
            UINT16 => Some(self.bytes().map(u16::from_le_bytes)?.into()),
            INT16 => u64::try_from(self.bytes().map(i16::from_le_bytes)?).ok(),
            UINT32 => Some(self.u32()?.into()),
            INT32 => u64::try_from(self.bytes().map(i32::from_le_bytes)?).ok(),
            UINT64 => Some(self.u64()?),
            _ => u64::try_from(self.bytes().map(i64::from_le_bytes)?).ok(),
        })
    }

    fn whole_number(&mut self, key: String) -> Result<u64, GgufError> {
        let kind = self.u32()?;
        let error = || GgufError::Kind { key, kind, expected: "an unsigned integer" };
        match kind {
            UINT8 | UINT16 | UINT32 | UINT64 => self.integer(kind)?.ok_or_else(error),
            _ => Err(error()),
        }
    }
}

const UINT8: u32 = 0;
const INT8: u32 = 1;
const UINT16: u32 = 2;
const INT16: u32 = 3;
const UINT32: u32 = 4;
const INT32: u32 = 5;
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const UINT64: u32 = 10;
const INT64: u32 = 11;

/// Bytes of a value of an integer type.
fn integer_bytes(kind: u32) -> Option<u64> {
    match kind {
        UINT8 | INT8 | UINT16 | INT16 | UINT32 | INT32 | UINT64 | INT64 => scalar_bytes(kind),
        _ => None,
    }
}

/// Bytes of a value of a metadata type (`gguf_type`) that has a fixed size.
fn scalar_bytes(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn check_limit(what: &'static str, value: u64, max: u64) -> Result<(), GgufError> {
    if value > max { Err(GgufError::TooMany { what, value, max }) } else { Ok(()) }
}
