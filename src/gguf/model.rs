//! A model on disk, all of its parts: its tensors and their bytes.

use super::error::GgufError;
use super::header::{Fact, Header, TensorInfo};
use crate::units::layer_number;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// What names of expert weights hold, in every architecture of llama.cpp.
const EXPERTS: &str = "_exps";
/// `[n_in, n_out, n_expert]`.
const EXPERT_DIMS: u32 = 3;

/// A model's files, which stay open, and its tensors by name.
pub struct ModelFile {
    path: PathBuf,
    parts: Vec<Part>,
    tensors: BTreeMap<String, (usize, TensorInfo)>,
    facts: BTreeMap<String, Fact>,
}

/// One of a model's files.
struct Part {
    path: PathBuf,
    file: File,
    len: u64,
    /// Parts that it says there are.
    n_parts: u64,
}

/// One expert tensor, `[n_in, n_out, n_expert]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertTensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// Shape, `[n_in, n_out, n_expert]`.
    pub shape: [u64; 3],
    /// Layer number, the N of `blk.N.`.
    pub layer: u32,
    /// Experts in it.
    pub n_expert: u64,
    /// Its size.
    pub n_bytes: u64,
}

/// One tensor and the file that its data is in.
pub struct ModelTensor<'a> {
    file: &'a File,
    /// What the file's header says of it.
    pub info: &'a TensorInfo,
}

impl ModelFile {
    /// Reads the headers of a model: of `path`, and if that is the first of several parts, of all of them.
    ///
    /// Fails with the file that cannot be read as GGUF, and a [`GgufError`].
    pub fn open(path: &Path) -> Result<Self> {
        let mut model = Self { path: path.into(), parts: Vec::new(), tensors: BTreeMap::new(), facts: BTreeMap::new() };
        let n_parts = model.add(path).map_err(|error| Error::file(path, error))?;
        for part in 2..=n_parts {
            let Some(path) = part_path(path, part, n_parts) else { break };
            model.add(&path).map_err(|error| Error::file(&path, error))?;
        }
        Ok(model)
    }

    /// The file that was named.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds one part; returns how many there are.
    fn add(&mut self, path: &Path) -> Result<u64, GgufError> {
        if !fs::metadata(path)?.is_file() {
            return Err(GgufError::NotRegular); // opening a pipe would wait for its other end
        }
        let file = File::open(path)?;
        let len = file.metadata()?.len();
        let header = Header::read(&file, len)?;
        let index = self.parts.len();
        self.tensors.extend(header.tensors.into_iter().map(|(name, info)| (name, (index, info))));
        for (key, fact) in header.facts {
            self.facts.entry(key).or_insert(fact); // the first part says what the model is
        }
        self.parts.push(Part { path: path.into(), file, len, n_parts: header.n_parts });
        Ok(header.n_parts)
    }

    /// Fails if a part is missing, or if a file ends before the data of its tensors.
    pub fn check_whole(&self) -> Result<()> {
        let found = self.parts.len() as u64;
        if let Some(part) = self.parts.iter().find(|part| part.n_parts != found) {
            return Err(Error::file(&part.path, GgufError::Parts { found, expected: part.n_parts }));
        }
        for (name, (part, info)) in &self.tensors {
            let Some(part) = self.parts.get(*part) else { continue };
            let end = info.offset.saturating_add(info.n_bytes);
            if end > part.len {
                return Err(Error::file(&part.path, GgufError::Data { name: name.clone(), end, len: part.len }));
            }
        }
        Ok(())
    }

    /// What the metadata says under this key, if it is a text.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.facts.get(key)? {
            Fact::Text(text) => Some(text),
            _ => None,
        }
    }

    /// What the metadata says of the model's architecture under `ARCHITECTURE.key`.
    pub fn fact(&self, key: &str) -> Option<&Fact> {
        self.facts.get(&format!("{}.{key}", self.text("general.architecture")?))
    }

    /// The same, if it is one number.
    pub fn number(&self, key: &str) -> Option<u64> {
        match self.fact(key)? {
            Fact::Number(number) => Some(*number),
            _ => None,
        }
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, (_, info))| (name.as_str(), info))
    }

    /// All tensors that hold a layer's experts.
    pub fn experts(&self) -> impl Iterator<Item = ExpertTensor<'_>> {
        self.tensors.iter().filter_map(|(name, (_, info))| {
            let layer = layer_number(name).filter(|_| name.contains(EXPERTS) && info.n_dims == EXPERT_DIMS)?;
            let [n_in, n_out, n_expert, _] = info.shape;
            Some(ExpertTensor { name, shape: [n_in, n_out, n_expert], layer, n_expert, n_bytes: info.n_bytes })
        })
    }

    /// Bytes of all expert tensors; `None` if there are none.
    pub fn expert_bytes(&self) -> Option<u64> {
        let bytes = self.experts().fold(0u64, |sum, tensor| sum.saturating_add(tensor.n_bytes));
        (bytes > 0).then_some(bytes)
    }

    /// The tensor of this name, if there is one.
    pub fn tensor(&self, name: &str) -> Option<ModelTensor<'_>> {
        let (part, info) = self.tensors.get(name)?;
        Some(ModelTensor { file: &self.parts.get(*part)?.file, info })
    }
}

impl ModelTensor<'_> {
    /// Fills `bytes` with the tensor's data from `offset` on.
    pub fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, self.info.offset.saturating_add(offset))
    }
}

/// The path of part `part` of `n_parts`, in llama.cpp's format, given that of the first.
fn part_path(first: &Path, part: u64, n_parts: u64) -> Option<PathBuf> {
    let name = first.file_name()?.to_str()?;
    let prefix = name.strip_suffix(&format!("-00001-of-{n_parts:05}.gguf"))?;
    Some(first.with_file_name(format!("{prefix}-{part:05}-of-{n_parts:05}.gguf")))
}
