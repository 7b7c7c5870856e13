//! Why the command ends, and with which exit code.

use crate::files::FileError;
use anyhow::Error;
use std::io;
use std::process::ExitCode;

/// Why the command ends.
#[derive(Debug)]
pub enum Failure {
    /// The user can mend it by typing something else. Exit code 2.
    Input(Error),
    /// Something that should work did not. Exit code 1.
    Internal(Error),
}

impl Failure {
    /// The exit code that stands for it.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code())
    }

    /// The same as a number.
    pub fn code(&self) -> u8 {
        match self {
            Self::Input(_) => 2,
            Self::Internal(_) => 1,
        }
    }

    /// What went wrong, on one line.
    pub fn line(&self) -> String {
        let (Self::Input(error) | Self::Internal(error)) = self;
        one_line(&format!("{error:#}"))
    }
}

/// Says whose fault an error is.
pub trait OrFail<T> {
    /// The user can mend it by typing something else.
    fn or_input(self) -> Result<T, Failure>;
    /// Something that should work did not.
    fn or_internal(self) -> Result<T, Failure>;
}

impl<T, E: Into<Error>> OrFail<T> for Result<T, E> {
    fn or_input(self) -> Result<T, Failure> {
        self.map_err(|error| Failure::Input(error.into()))
    }

    fn or_internal(self) -> Result<T, Failure> {
        self.map_err(|error| Failure::Internal(error.into()))
    }
}

/// With the system's own error, so that its kind decides on the exit code.
pub fn told(error: FileError) -> Error {
    match error {
        FileError::System { action, error } => Error::new(error).context(action),
        other => other.into(),
    }
}

/// Something that the user has named cannot be used: bad input where another name would do, else a failure of the system,
/// such as a full disk.
pub fn named_by_user(error: Error) -> Failure {
    let cause = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>());
    if cause.is_none_or(another_name_would_do) { Failure::Input(error) } else { Failure::Internal(error) }
}

fn another_name_would_do(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    let is_name = matches!(
        error.kind(),
        Kind::NotFound
            | Kind::PermissionDenied
            | Kind::IsADirectory
            | Kind::NotADirectory
            | Kind::ReadOnlyFilesystem
            | Kind::InvalidInput
            | Kind::InvalidData
            | Kind::InvalidFilename
    );
    is_name || matches!(error.raw_os_error(), Some(libc::ENOEXEC | libc::ELOOP))
}

/// The text with control characters written out, whatever a file is called.
fn one_line(text: &str) -> String {
    let written = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(written).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn bad_input_ends_with_2_and_everything_else_with_1() {
        assert_eq!(Err::<(), _>(anyhow!("x")).or_input().unwrap_err().exit_code(), ExitCode::from(2));
        assert_eq!(Err::<(), _>(anyhow!("x")).or_internal().unwrap_err().exit_code(), ExitCode::from(1));
    }

    #[test]
    fn a_file_in_a_folder_that_is_not_there_is_bad_input_and_a_full_disk_is_not() {
        let code = |kind| named_by_user(Error::new(io::Error::from(kind)).context("x")).exit_code();
        assert_eq!(code(io::ErrorKind::NotFound), ExitCode::from(2));
        assert_eq!(code(io::ErrorKind::StorageFull), ExitCode::from(1));
        assert_eq!(named_by_user(anyhow!("no profile")).exit_code(), ExitCode::from(2));
    }

    #[test]
    fn what_is_no_program_is_bad_input() {
        let error = io::Error::from_raw_os_error(libc::ENOEXEC);
        assert_eq!(named_by_user(error.into()).exit_code(), ExitCode::from(2));
        let error = io::Error::from_raw_os_error(libc::ENFILE);
        assert_eq!(named_by_user(error.into()).exit_code(), ExitCode::from(1));
    }

    #[test]
    fn what_is_told_is_one_line_with_its_causes() {
        let failure = Failure::Input(anyhow!("no such\nfile").context("--moe-hot-cache"));
        assert_eq!(failure.line(), "--moe-hot-cache: no such\\nfile");
    }
}
