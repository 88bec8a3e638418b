terraform {
  # 1.11 is the first with write-only arguments; secrets depend on them.
  required_version = ">= 1.11"

  required_providers {
    archive = {
      source  = "hashicorp/archive"
      version = ">= 2.8, < 3.0"
    }
    google = {
      source  = "hashicorp/google"
      version = ">= 8.7, < 9.0"
    }
    random = {
      source  = "hashicorp/random"
      version = ">= 3.9, < 4.0"
    }
    time = {
      source  = "hashicorp/time"
      version = ">= 0.14, < 1.0"
    }
  }
}

provider "google" {
  project = var.project_id
  region  = var.region

  default_labels = {
    application = var.name
  }
}

# The same provider once more, for reading a secret back: Terraform's mocks know no ephemeral
# resources, so the tests mock the one above and leave this one as it is.
provider "google" {
  alias   = "reading_back"
  project = var.project_id
  region  = var.region
}
