//! The tools of a request, and the grammar of an answer that must call a tool or follow a format.

use super::super::app::App;
use super::fields::{ResponseFormat, ToolChoiceField, ToolField};
use crate::engine::{AnswerOptions, Constraint, Grammar};
use crate::error::RequestError;
use crate::text::{Tool, ToolChoice, tool_grammar};
use burn_gemma4::Tokenizer;

/// The special token that begins a tool call.
const CALL: &str = "<|tool_call>";
/// The special token that the model writes after its last tool call. The client must then send the results of the calls.
const RESPONSE: &str = "<|tool_response>";
/// The largest number of tools in a request.
const MAX_TOOLS: usize = 256;

/// The tools of a request, and whether the answer may, must or must not call a tool.
#[derive(Debug, Default)]
pub(crate) struct SelectedTools {
    pub tools: Vec<Tool>,
    pub choice: ToolChoice,
    pub is_parallel: bool,
}

impl SelectedTools {
    /// Checks the number and the names of the tools, and that `tool_choice` fits the tools.
    pub fn new(
        tools: Vec<Tool>,
        choice: ToolChoice,
        is_parallel: bool,
    ) -> Result<Self, RequestError> {
        if tools.len() > MAX_TOOLS {
            let reason = format!("has {} tools; expected at most {MAX_TOOLS}", tools.len());
            return Err(RequestError::field("tools", reason));
        }
        for (index, tool) in tools.iter().enumerate() {
            let is_allowed = |char: char| char.is_ascii_alphanumeric() || "_-.".contains(char);
            let name = &tool.name;
            if name.is_empty() || name.len() > 128 || !name.chars().all(is_allowed) {
                let reason = format!(
                    "is {name:?}; expected 1 to 128 letters, digits, dots, dashes and underscores"
                );
                return Err(RequestError::field(format!("tools[{index}].name"), reason));
            }
            if tools[..index].iter().any(|other| other.name == tool.name) {
                let reason = format!("is {name:?} twice; expected different names");
                return Err(RequestError::field(format!("tools[{index}].name"), reason));
            }
        }
        match &choice {
            ToolChoice::Required if tools.is_empty() => {
                let reason = "asks for a tool; expected at least 1 tool in `tools`";
                return Err(RequestError::field("tool_choice", reason));
            }
            ToolChoice::Named(name) if tools.iter().all(|tool| tool.name != *name) => {
                let reason = format!("names {name:?}; expected the name of a tool in `tools`");
                return Err(RequestError::field("tool_choice", reason));
            }
            _ => (),
        }
        Ok(Self {
            // Leave the tools out of the prompt if the model must not call a tool.
            tools: match choice {
                ToolChoice::None => Vec::new(),
                _ => tools,
            },
            choice,
            is_parallel,
        })
    }

    /// Changes an answer's options: forbids tool calls, limits the answer to one call, or makes the answer end after
    /// its calls.
    pub fn apply(&self, tokenizer: &Tokenizer, options: &mut AnswerOptions) {
        if self.choice == ToolChoice::None
            && let Some(call) = tokenizer.id(CALL)
        {
            options.sampling.suppress_tokens.push(call);
        }
        if !self.tools.is_empty() {
            options.single_tool_call = !self.is_parallel;
            let response = tokenizer.id(RESPONSE);
            let response = response.filter(|token| !options.stop_tokens.contains(token));
            options.stop_tokens.extend(response);
        }
    }

    /// Returns the grammar of an answer that must call a tool, or `None` if the answer need not call a tool.
    fn grammar(&self, tokenizer: &Tokenizer) -> Result<Option<Grammar>, RequestError> {
        let tools: Vec<&Tool> = match &self.choice {
            ToolChoice::Auto | ToolChoice::None => return Ok(None),
            ToolChoice::Required => self.tools.iter().collect(),
            ToolChoice::Named(name) => {
                let named = self.tools.iter().filter(|tool| tool.name == *name);
                named.collect()
            }
        };
        let is_parallel = self.is_parallel && self.choice == ToolChoice::Required;
        match tool_grammar(tokenizer, &tools, is_parallel) {
            Some(grammar) => Ok(Some(grammar)),
            None => {
                let reason = "cannot be enforced, because the vocabulary has no tokens for tool calls; expected \"auto\" or \"none\"";
                Err(RequestError::field("tool_choice", reason))
            }
        }
    }
}

/// Converts the request fields `tools`, `tool_choice` and `parallel_tool_calls`.
pub(crate) fn select_tools(
    tools: Vec<ToolField>,
    choice: Option<ToolChoiceField>,
    is_parallel: bool,
) -> Result<SelectedTools, RequestError> {
    let tools = tools.into_iter().enumerate().map(|(index, tool)| {
        let field = |name| format!("tools[{index}].{name}");
        if tool.kind != "function" {
            let reason = format!("is {:?}; expected \"function\"", tool.kind);
            return Err(RequestError::field(field("type"), reason));
        }
        let function = tool
            .function
            .ok_or_else(|| RequestError::field(field("function"), "is missing"))?;
        Ok(Tool {
            name: function.name,
            description: function.description,
            parameters: function.parameters,
        })
    });
    let tools = tools.collect::<Result<Vec<_>, _>>()?;
    SelectedTools::new(tools, tool_choice(choice)?, is_parallel)
}

/// Converts the request field `tool_choice`.
pub(crate) fn tool_choice(choice: Option<ToolChoiceField>) -> Result<ToolChoice, RequestError> {
    let refuse = |reason: String| Err(RequestError::field("tool_choice", reason));
    match choice {
        None => Ok(ToolChoice::Auto),
        Some(ToolChoiceField::Word(word)) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => Ok(ToolChoice::Required),
            word => refuse(format!(
                "is {word:?}; expected \"auto\", \"none\", \"required\" or a function"
            )),
        },
        Some(ToolChoiceField::Tool(tool)) if tool.kind == "function" => {
            match tool.function.map(|function| function.name).or(tool.name) {
                Some(name) => Ok(ToolChoice::Named(name)),
                None => refuse("has no name; expected the name of a function".into()),
            }
        }
        Some(ToolChoiceField::Tool(tool)) => refuse(format!(
            "has the type {:?}; expected \"function\"",
            tool.kind
        )),
    }
}

/// Compiles the grammar of the required tool calls or of the response format. Returns `None` if the answer is not
/// constrained.
pub(crate) fn answer_grammar(
    app: &App,
    tools: &SelectedTools,
    format: Option<ResponseFormat>,
    may_think: bool,
) -> Result<Option<Constraint>, RequestError> {
    let calls = tools.grammar(&app.text.tokenizer)?;
    let (field, format) = match format {
        None | Some(ResponseFormat::Text) => ("response_format", None),
        Some(ResponseFormat::JsonObject) => ("response_format", Some(Grammar::json_object())),
        Some(ResponseFormat::JsonSchema { json_schema }) => {
            let schema = json_schema.schema;
            let field = "response_format.json_schema.schema";
            let schema = schema.ok_or_else(|| RequestError::field(field, "is missing"))?;
            (field, Some(Grammar::JsonSchema(schema)))
        }
        Some(ResponseFormat::Regex { regex }) => {
            ("response_format.regex", Some(Grammar::Regex(regex)))
        }
        Some(ResponseFormat::Grammar { grammar }) => {
            ("response_format.grammar", Some(Grammar::Lark(grammar)))
        }
    };
    let (field, grammar) = match (calls, format) {
        (None, None) => return Ok(None),
        (Some(calls), None) => ("tool_choice", calls),
        (None, Some(_)) if !tools.tools.is_empty() => {
            let reason = "cannot be combined with tools that the model may call; expected `tool_choice: \"none\"`";
            return Err(RequestError::field("response_format", reason));
        }
        (None, Some(format)) => (field, format),
        (Some(_), Some(_)) => {
            let reason = "cannot be combined with a tool that must be called";
            return Err(RequestError::field("response_format", reason));
        }
    };
    app.compile(field, &grammar, may_think).map(Some)
}
