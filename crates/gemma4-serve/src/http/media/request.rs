//! The images and audio of one request. All of them are checked by their headers before the first one is decoded.

use super::super::client_state::ClientState;
use super::kind::Kind;
use super::source::{MediaSource, SourceFile};
use super::store::MediaStore;
use crate::engine::MediaMemory;
use crate::error::RequestError;
use crate::text::{TextModel, of_field};
use burn_gemma4::{Audio, Image, MediumSize, PreparedAudio, PreparedImage};

/// The images and audio of one request, in the order of the conversation.
pub(crate) struct RequestMedia<'a> {
    store: &'a MediaStore,
    text: &'a TextModel,
    client: &'a ClientState,
    images: usize,
    clips: usize,
    /// The media whose headers have not been read yet.
    sources: Vec<Source>,
    measured: Vec<Measured>,
    /// The memory of all resized images and features.
    memory: Option<MediaMemory>,
    /// The number of bytes of all files, resized images and features.
    taken: usize,
}

/// A medium of which only the source is known.
struct Source {
    /// The field of the request with the medium.
    field: String,
    kind: Kind,
    source: MediaSource,
}

/// A medium whose header has been read.
struct Measured {
    field: String,
    kind: Kind,
    file: SourceFile,
    size: MediumSize,
    /// The memory for decoding and preparing the medium, in bytes.
    needed: usize,
}

/// The images and audio clips of a request in the forms that the model reads, and their memory.
#[derive(Default)]
pub(crate) struct PreparedMedia {
    pub images: Vec<PreparedImage>,
    pub audio: Vec<PreparedAudio>,
    pub memory: Option<MediaMemory>,
}

impl<'a> RequestMedia<'a> {
    pub(super) fn new(store: &'a MediaStore, text: &'a TextModel, client: &'a ClientState) -> Self {
        Self {
            store,
            text,
            client,
            images: 0,
            clips: 0,
            sources: Vec::new(),
            measured: Vec::new(),
            memory: None,
            taken: 0,
        }
    }

    /// The numbers of images and audio clips.
    pub fn counts(&self) -> [usize; 2] {
        [self.images, self.clips]
    }

    /// Adds a medium without reading its file. `field` is the field of the request with the medium. Returns the index
    /// of the medium.
    ///
    /// # Errors
    /// Returns an error that names the field if the model does not read such media, if the request has too many of
    /// them, or if the source is malformed or not supported.
    pub fn add(
        &mut self,
        field: &str,
        kind: Kind,
        source: MediaSource,
    ) -> Result<usize, RequestError> {
        let count = match kind {
            Kind::Image { .. } => {
                self.text.check_vision(field)?;
                &mut self.images
            }
            Kind::Audio => {
                self.text.check_audio(field)?;
                &mut self.clips
            }
        };
        *count += 1;
        let (options, noun) = (&self.store.options, kind.noun());
        let most = kind.max_count(options);
        if *count > most {
            let reason =
                format!("is {noun} {count} of the request; expected at most {most} {noun}s");
            return Err(RequestError::field(field, reason));
        }
        source.check(field, kind, options)?;
        self.sources.push(Source {
            field: field.into(),
            kind,
            source,
        });
        Ok(self.sources.len() - 1)
    }

    /// Puts the media into the order of a conversation, which contains each of `indices` once. Tool results may precede
    /// the parts of their message.
    pub fn arrange(&mut self, indices: impl Iterator<Item = usize>) {
        let mut sources: Vec<_> = self.sources.drain(..).map(Some).collect();
        let arranged = indices.filter_map(|index| sources.get_mut(index)?.take());
        self.sources = arranged.collect();
    }

    /// Reads the headers of all media, and reserves the memory of their resized images and features. Returns a lower
    /// bound of the number of tokens that they add to a prompt, in which each of them is one placeholder. The call
    /// blocks.
    ///
    /// # Errors
    /// Returns an error that names the field if a header is malformed, or if it exceeds a limit. Returns
    /// [`ErrorKind::Busy`](crate::ErrorKind::Busy) if there is no memory, and an error if the client has left.
    pub fn measure(&mut self) -> Result<usize, RequestError> {
        for source in std::mem::take(&mut self.sources) {
            let measured = self.measured(source)?;
            self.measured.push(measured);
        }
        Ok(self.measured_tokens())
    }

    /// Returns a lower bound of the number of tokens that the measured media add to a prompt.
    fn measured_tokens(&self) -> usize {
        let tokens = self.measured.iter().map(|one| one.size.tokens - 1);
        tokens.sum()
    }

    fn measured(&mut self, source: Source) -> Result<Measured, RequestError> {
        let Source {
            field,
            kind,
            source,
        } = source;
        let store = self.store;
        let options = &store.options;
        let _processor = store.wait_for_processor()?;
        self.client.check()?;
        let file = source.read(&field, kind, store, &mut self.taken)?;
        let of_header = |error| of_field(&field, error);
        let (decoding, size) = match kind {
            Kind::Image { soft_tokens } => {
                let header = Image::header(&file.bytes).map_err(of_header)?;
                let most = options.images.max_pixels;
                if header.width.saturating_mul(header.height) > most {
                    let reason = format!(
                        "has {} x {} pixels; expected at most {most} pixels",
                        header.width, header.height
                    );
                    return Err(RequestError::field(field, reason));
                }
                let size = |soft_tokens| self.text.image_size(&field, &header, soft_tokens);
                let own = size(soft_tokens).map_err(|error| match size(None) {
                    // The image would fit without the option `detail`, which is beside the URL.
                    Ok(_) => of_detail(&field, error),
                    Err(_) => error,
                });
                (header.decoding_bytes, own?)
            }
            Kind::Audio => {
                let header = Audio::header(&file.bytes).map_err(of_header)?;
                (
                    header.decoding_bytes,
                    self.text.audio_size(&field, &header)?,
                )
            }
        };
        let decoding = usize::try_from(decoding).unwrap_or(usize::MAX);
        let needed = decoding.saturating_add(size.preparing_bytes);
        if needed > options.memory {
            let reason = format!(
                "needs {} MiB to be decoded; expected at most {} MiB",
                needed.div_ceil(1 << 20),
                options.memory >> 20
            );
            return Err(RequestError::field(field, reason));
        }
        let memory = store.reserve(&field, &mut self.taken, size.bytes)?;
        match &mut self.memory {
            Some(all) => all.merge(memory),
            none => *none = Some(memory),
        }
        Ok(Measured {
            field,
            kind,
            file,
            size,
            needed,
        })
    }

    /// Decodes and prepares all media, whose headers have been read. The call blocks. `check` is called with a larger
    /// lower bound of the number of tokens that the media add to a prompt after each clip whose header had no length.
    /// The next one is not decoded if the prompt is too long already.
    ///
    /// # Errors
    /// Returns the errors of `check`.
    /// Returns an error that names the field if a file is malformed. Returns
    /// [`ErrorKind::Busy`](crate::ErrorKind::Busy) if too many media wait, and an error if the client has left.
    pub fn prepare(
        self,
        mut check: impl FnMut(usize) -> Result<(), RequestError>,
    ) -> Result<PreparedMedia, RequestError> {
        let mut tokens = self.measured_tokens();
        let mut prepared = PreparedMedia {
            memory: self.memory,
            ..PreparedMedia::default()
        };
        for medium in self.measured {
            let Measured {
                field,
                kind,
                file,
                needed,
                size,
            } = medium;
            let of_file = |error| of_field(&field, error);
            let _processor = self.store.wait_for_processor()?;
            let _decoding = self.store.wait_for_memory(needed)?;
            self.client.check()?;
            match kind {
                Kind::Image { soft_tokens } => {
                    let mut image = Image::from_bytes(&file.bytes).map_err(of_file)?;
                    drop(file);
                    if let Some(count) = soft_tokens {
                        image = image.with_max_soft_tokens(count).map_err(of_file)?;
                    }
                    prepared.images.push(self.text.prepare(&field, &image)?);
                }
                Kind::Audio => {
                    let audio = Audio::from_bytes(&file.bytes).map_err(of_file)?;
                    drop(file);
                    let audio = self.text.prepare_audio(&field, &audio)?;
                    if audio.tokens() > size.tokens {
                        tokens += audio.tokens() - size.tokens;
                        check(tokens)?;
                    }
                    prepared.audio.push(audio);
                }
            }
        }
        Ok(prepared)
    }
}

/// Moves an error about the URL of an image to the option `detail` beside it.
fn of_detail(field: &str, error: RequestError) -> RequestError {
    let parent = field.rsplit_once('.').map_or(field, |(parent, _)| parent);
    let reason = error.message.strip_prefix(&format!("{field}: "));
    let reason = reason.unwrap_or(&error.message);
    RequestError::field(format!("{parent}.detail"), reason)
}
